{{/* Names. Everything of a release starts with it; 48 characters leave room for "-expert-headless". */}}
{{- define "forefetch.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}{{ .Release.Name | trunc 48 | trimSuffix "-" }}
{{- else -}}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 48 | trimSuffix "-" }}{{- end -}}
{{- end }}

{{- define "forefetch.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}{{ .Values.serviceAccount.name | default (include "forefetch.fullname" .) }}
{{- else }}{{ .Values.serviceAccount.name | default "default" }}{{ end -}}
{{- end }}

{{/* Labels that never change: selectors. Argument: (dict "root" $ "component" "router"). */}}
{{- define "forefetch.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "forefetch.labels" -}}
{{ include "forefetch.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: forefetch
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{/* One setting as text. Helm reads numbers as floats and would print 1000000 as 1e+06. */}}
{{- define "forefetch.text" -}}
{{- if kindIs "float64" . }}{{ if eq (floor .) . }}{{ printf "%.0f" . }}{{ else }}{{ . }}{{ end }}{{ else }}{{ . }}{{ end -}}
{{- end }}

{{/* Settings that all services share, then those of the values. Argument: root, prefix (ROUTER), settings. */}}
{{- define "forefetch.environment" -}}
{{- $prefix := printf "FOREFETCH_%s_" .prefix -}}
{{- $common := dict "drain_s" .root.Values.drain.seconds "trace_ratio" .root.Values.telemetry.traceRatio -}}
{{- with .root.Values.telemetry.otlpEndpoint }}{{ $_ := set $common "otlp_endpoint" . }}{{ end -}}
{{- if .root.Values.tls.existingSecret -}}
{{- $_ := set $common "tls_cert" "/etc/forefetch/tls/tls.crt" -}}
{{- $_ := set $common "tls_key" "/etc/forefetch/tls/tls.key" -}}
{{- $_ := set $common "tls_ca" "/etc/forefetch/tls/ca.crt" -}}
{{- else if .root.Values.tls.allowPlaintext -}}
{{- $_ := set $common "allow_plaintext" true -}}
{{- else }}{{ fail "tls: name existingSecret, or set allowPlaintext" }}{{ end -}}
{{- range $name, $value := merge (deepCopy .settings) .fixed $common }}
{{ $prefix }}{{ upper $name }}: {{ include "forefetch.text" $value | quote }}
{{- end }}
{{- end }}

{{/* Not empty where routers are to find and place workers. */}}
{{- define "forefetch.planned" -}}
{{- if and (eq .Values.expert.mode "pods") .Values.expert.planned.enabled }}yes{{ end -}}
{{- end }}

{{/* Addresses of all workers: replica after replica, shards in order; or where to find them. */}}
{{- define "forefetch.workers" -}}
{{- $name := include "forefetch.fullname" . -}}
{{- $addresses := list -}}
{{- if eq .Values.expert.mode "sidecars" -}}
{{- range $shard := until (int .Values.expert.shards) }}{{ $addresses = append $addresses (printf "127.0.0.1:%d" (add 50100 $shard)) }}{{ end -}}
{{- else if include "forefetch.planned" . -}}
{{- $addresses = append $addresses (printf "kubernetes:%s/%s-expert" .Release.Namespace $name) -}}
{{- else if eq .Values.expert.mode "pods" -}}
{{- $domain := printf "%s-expert.%s.svc.%s" $name .Release.Namespace .Values.clusterDomain -}}
{{- range $replica := until (int .Values.expert.replicas) }}{{ range $shard := until (int $.Values.expert.shards) -}}
{{- $addresses = append $addresses (printf "%s-expert-%d-%d.%s:50051" $name $replica $shard $domain) -}}
{{- end }}{{ end -}}
{{- else }}{{ $addresses = append $addresses "local" }}{{ end -}}
{{- join "," $addresses -}}
{{- end }}

{{- define "forefetch.image" -}}
{{ .Values.image.repository }}{{ with .Values.image.digest }}@{{ . }}{{ else }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end }}

{{- define "forefetch.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "forefetch.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* Where a pod of routers or experts runs. Argument: root, component, shards (true: spread replicas of a
     shard as well). */}}
{{- define "forefetch.scheduling" -}}
{{- $values := .root.Values.scheduling -}}
{{- with $values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- if and $values.runtimeClassName (ne .component "kv") }}
runtimeClassName: {{ $values.runtimeClassName }}
{{- end }}
{{- with $values.spread }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "forefetch.selector" $ | nindent 8 }}
  {{- if $.shards }}
  # Of each shard, too: a node that is lost takes one replica with it.
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    matchLabelKeys: [apps.kubernetes.io/pod-index]
    labelSelector:
      matchLabels: {{- include "forefetch.selector" $ | nindent 8 }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Requests and limits with GPUs. Argument: resources, gpus. */}}
{{- define "forefetch.resources" -}}
{{- $resources := deepCopy .resources -}}
{{- if .gpus -}}
{{- $_ := set $resources "limits" (merge (dict "nvidia.com/gpu" (int .gpus)) ($resources.limits | default dict)) -}}
{{- end -}}
{{ toYaml $resources }}
{{- end }}

{{/* Probes. The kubelet speaks no TLS, so they ask the health port. Argument: port, loadSeconds (0: no startup probe). */}}
{{- define "forefetch.probes" -}}
{{- if .loadSeconds }}
startupProbe:
  grpc: {port: {{ .port }}, service: startup}
  periodSeconds: 5
  failureThreshold: {{ div (add .loadSeconds 64) 5 }}
{{- end }}
livenessProbe: # steps move, or there is nothing to do; a long queue is no reason
  grpc: {port: {{ .port }}, service: liveness}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
readinessProbe: # a call would be served now
  grpc: {port: {{ .port }}, service: readiness}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 1
{{- end }}

{{- define "forefetch.loadSeconds" -}}
{{ div (mul .Values.model.sizeGiB 1024) .Values.model.readMiBs }}
{{- end }}

{{/* Volumes and mounts. */}}
{{- define "forefetch.volumes" -}}
- name: tmp
  emptyDir: {}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .Values.shmSizeLimit }}}
- name: model
  {{- $model := .Values.model }}
  {{- if and $model.persistentVolumeClaim $model.init.image }}{{ fail "model: set persistentVolumeClaim or init.image, not both" }}{{ end }}
  {{- if $model.persistentVolumeClaim }}
  persistentVolumeClaim: {claimName: {{ $model.persistentVolumeClaim }}, readOnly: true}
  {{- else if $model.init.image }}
  emptyDir: {sizeLimit: {{ add 1 $model.sizeGiB }}Gi}
  {{- else }}
  hostPath: {path: {{ $model.hostPath }}, type: Directory}
  {{- end }}
{{- include "forefetch.tlsVolume" . }}
{{- end }}

{{- define "forefetch.tlsVolume" -}}
{{- with .Values.tls.existingSecret }}
- name: tls
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- end }}

{{/* One entry of the Secret for callers. Argument: root, key. */}}
{{- define "forefetch.authVolume" -}}
{{- with .root.Values.auth.existingSecret }}
- name: auth
  secret: {secretName: {{ . }}, defaultMode: 0440, items: [{key: {{ $.key }}, path: {{ $.key }}}]}
{{- end }}
{{- end }}

{{- define "forefetch.authMount" -}}
{{- if .Values.auth.existingSecret }}
- {name: auth, mountPath: /etc/forefetch/auth, readOnly: true}
{{- end }}
{{- end }}

{{- define "forefetch.mounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: shm, mountPath: /dev/shm}
- {name: model, mountPath: /models, readOnly: true}
{{- include "forefetch.tlsMount" . }}
{{- end }}

{{- define "forefetch.tlsMount" -}}
{{- if .Values.tls.existingSecret }}
- {name: tls, mountPath: /etc/forefetch/tls, readOnly: true}
{{- end }}
{{- end }}

{{- define "forefetch.initModel" -}}
{{- with .Values.model.init }}
{{- if .image }}
- name: model
  image: {{ .image }}
  {{- with .command }}
  command: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .args }}
  args: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .envFromSecret }}
  envFrom: [{secretRef: {name: {{ . }}}}]
  {{- end }}
  securityContext: {{- include "forefetch.containerSecurity" $ | nindent 4 }}
  resources:
    requests: {cpu: "1", memory: 1Gi}
    limits: {memory: 2Gi}
  volumeMounts:
    - {name: model, mountPath: /models}
    - {name: tmp, mountPath: /tmp}
{{- end }}
{{- end }}
{{- end }}

{{/* What the pods of all services have. Argument: root. */}}
{{- define "forefetch.podBasics" -}}
serviceAccountName: {{ include "forefetch.serviceAccount" . }}
enableServiceLinks: false
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext: {{- include "forefetch.podSecurity" . | nindent 2 }}
{{- end }}

{{- define "forefetch.preStop" -}}
preStop:
  exec: {command: [sleep, {{ .Values.drain.preStopSeconds | quote }}]}
{{- end }}

{{- define "forefetch.podMeta" -}}
labels:
  {{- include "forefetch.labels" . | nindent 2 }}
  {{- with .root.Values.podLabels }}{{- toYaml . | nindent 2 }}{{- end }}
annotations:
  checksum/config: {{ include (print .root.Template.BasePath "/configmap.yaml") .root | sha256sum }}
  {{- with .root.Values.podAnnotations }}{{- toYaml . | nindent 2 }}{{- end }}
{{- end }}

{{/* A worker's container. Argument: root, name, prefix of port names, host, port, health, metrics,
     shard ("": the pod's ordinal; "planned": what the planner says), loadSeconds. */}}
{{- define "forefetch.expertContainer" -}}
name: {{ .name }}
image: {{ include "forefetch.image" .root }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
args: [expert_worker]
envFrom: [{configMapRef: {name: {{ include "forefetch.fullname" .root }}-expert}}]
env:
  {{- if eq .shard "planned" }}
  - {name: FOREFETCH_EXPERT_PLACED, value: "true"}
  {{- else if eq .shard "" }}
  - name: FOREFETCH_EXPERT_SHARD
    valueFrom: {fieldRef: {fieldPath: "metadata.labels['apps.kubernetes.io/pod-index']"}}
  {{- else }}
  - {name: FOREFETCH_EXPERT_SHARD, value: {{ .shard | quote }}}
  {{- end }}
  - {name: FOREFETCH_EXPERT_LISTEN, value: {{ printf "%s:%v" .host .port | quote }}}
  - {name: FOREFETCH_EXPERT_HEALTH_LISTEN, value: "0.0.0.0:{{ .health }}"}
  - {name: FOREFETCH_EXPERT_METRICS_LISTEN, value: "0.0.0.0:{{ .metrics }}"}
ports:
  - {name: {{ .prefix }}grpc, containerPort: {{ .port }}}
  - {name: {{ .prefix }}metrics, containerPort: {{ .metrics }}}
  - {name: {{ .prefix }}health, containerPort: {{ .health }}}
{{- include "forefetch.probes" (dict "port" .health "loadSeconds" .loadSeconds) }}
{{- if eq .shard "planned" }}
lifecycle: # others load its experts meanwhile
  preStop:
    exec: {command: [sleep, {{ .root.Values.expert.planned.leaveSeconds | quote }}]}
{{- end }}
resources: {{- include "forefetch.resources" (dict "resources" .root.Values.expert.resources "gpus" .root.Values.expert.gpus) | nindent 2 }}
securityContext: {{- include "forefetch.containerSecurity" .root | nindent 2 }}
volumeMounts: {{- include "forefetch.mounts" .root | nindent 2 }}
{{- end }}
